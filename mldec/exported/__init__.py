"""Files that answer by themselves: ONNX and .pt2, what they say of themselves, and running them."""
