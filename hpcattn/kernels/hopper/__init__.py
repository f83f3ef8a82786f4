"""Gluon kernels for NVIDIA Hopper. On CPU tensors they run in `hpcattn.emulator`: real kernels, tiny shapes."""
