"""Where each slice of a checkpoint's tensors lies in a rank's storage."""
