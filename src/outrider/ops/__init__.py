"""Kernels: C++ beside the Python that builds, loads and calls them."""
