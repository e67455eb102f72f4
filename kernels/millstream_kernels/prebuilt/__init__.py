"""Kernels that were compiled before: how they are stored, found by a launch, and started without any compiler.

hack.kernels.prebuild    every variant -> <folder>/index.json, <key>.cubin, <key>.json
install(folder)          a launch looks its variant up there instead of compiling it
"""
