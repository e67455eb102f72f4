"""A mixture of experts without a number that is read back: routing, order by expert, products, sum."""
