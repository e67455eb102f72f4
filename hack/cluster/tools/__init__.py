"""Build and install the tools that a local cluster needs: the Go toolchain, programs in Go, and uv."""
