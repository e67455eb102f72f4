"""Kernels for a CPU: Python that numba compiles when the project is built (`hack.kernels.prebuild_cpu`), never later.

task.py             what each kernel is given
paged_decode.py     attention of decodes    \
paged_prefill.py    attention of prompts     |
elementwise.py      norm, gate, rotation     |  the kernels, which only the compiler imports
packed_product.py   16-bit weights           |
stored_numbers.py   keys, values to float32  |
vectors.py          loops over vectors       |
product_vectors.py  tiles of a product       |
intrinsics.py       what all of them share  /
code_folder.py      the folder of machine code: what it is, for which CPUs
loaded_code.py      that code in this process, and its functions in torch's threads
pools.py            what both functions of attention are given
decode.py           the typed function of attention of decodes
prefill.py          that of prompts
layers.py           the typed functions of norm, gate and rotation
product.py          the typed function of products by 16-bit weights
integer/            products by weights in codes of 4 to 8 bits
"""
