"""What is sent, planned once from names, shapes and dtypes, and what fills a bucket with it."""
