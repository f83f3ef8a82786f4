"""Plain Triton kernels: any recent GPU, or any CPU through Triton's interpreter."""
