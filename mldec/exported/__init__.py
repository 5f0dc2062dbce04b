"""ONNX files of mldec.export, which answer by themselves: what they say, and running them."""
