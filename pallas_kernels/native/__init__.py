"""C++ kernels for CPUs with AVX-512 BF16, compiled at first use and called through XLA's foreign function interface."""
