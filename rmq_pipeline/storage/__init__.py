"""Storage roots: folders of files, local or on another file system."""
