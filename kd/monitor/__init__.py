"""What ``monitor.*`` turns on: callbacks that measure, send and act."""
