"""The filesystem of fsspec, which finds the module ``fsspec`` by an entry point."""
