"""Kernels for a CPU: Python that numba compiles when the project is built (`hack.kernels.prebuild_cpu`), never later.

task.py             what the decode kernel is given
paged_decode.py     the kernel, which only the compiler imports
code_folder.py      the folder of machine code: what it is, for which CPUs
loaded_code.py      that code in this process, and its functions in torch's threads
decode.py           the kernel's typed function
"""
