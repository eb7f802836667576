"""Everything that imports triton or ctypes for a device."""
