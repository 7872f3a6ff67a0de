"""What is sent, planned once from names, shapes and dtypes, and the bucket that it fills."""
