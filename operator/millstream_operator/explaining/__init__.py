"""Plans for people: the table of `millstream plan`, the bar of its ledger, plans side by side. Pure: data to text."""
