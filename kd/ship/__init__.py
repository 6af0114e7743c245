"""From a finished run to what other programs load: exports, the server."""
