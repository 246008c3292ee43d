"""From memory to blobs and their manifest."""
