"""The interfaces of other libraries, served by the public functions. Each module is imported by name."""
