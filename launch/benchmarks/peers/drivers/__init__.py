"""What runs in the interpreters of peers; each file stands alone."""
