"""Kernels for a CPU: Python that numba compiles when the project is built (`hack.kernels.prebuild_cpu`), never later.

task.py             what each kernel is given
paged_decode.py     attention of decodes \
elementwise.py      norm, gate, rotation  > the kernels, which only the compiler imports
intrinsics.py       what they share      /
code_folder.py      the folder of machine code: what it is, for which CPUs
loaded_code.py      that code in this process, and its functions in torch's threads
decode.py           the typed function of attention
layers.py           the typed functions of norm, gate and rotation
"""
