"""How the demo model and its draft were made: `python -m hack.training` repeats it from a seed.

knowledge/*.yaml   what the model knows: our own words, one entry a term
knowledge.py       reads them
phrasings.py       questions about a term, and which of them training never sees
conversations.py   an endless, seeded stream of conversations and plain paragraphs
tokenizer.py       a byte-level BPE trained on that stream, with the chat template
batches.py         rows of token ids and labels
recipe.py          the two shapes and every hyper-parameter
train.py           the loop
evaluate.py        perplexity, exact answers and draft agreement on questions that training never saw
export.py          Hugging Face folders, 16 bit
card.py            the model cards, from what was measured
"""
