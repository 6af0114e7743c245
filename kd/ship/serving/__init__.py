"""A student behind HTTP: ONNX Runtime inside, batches made of what waits. Loads no torch unless a teacher is asked."""
