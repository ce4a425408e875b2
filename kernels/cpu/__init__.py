"""Fast CPU kernels: compiled C++ (`compiled`, sources in `native/`) and plain torch for want of a compiler (`fallback`)."""
