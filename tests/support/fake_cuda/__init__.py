"""A device named "cuda" for a CPU build of torch, to rehearse what a GPU will be asked to do: it is no GPU.

`tests/support/fake_cuda/device.cpp` fills the slots that such a torch has for CUDA: tensors are plain ``cuda:0``
tensors, new memory is not a number, copies come late, tensors of two devices do not mix, and every wait of the host is
told with the line that asked for it. Kernels are the CPU's and run at once: no speed, no rounding and no order of
streams is a GPU's.
"""
