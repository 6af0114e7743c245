"""From a command line and YAML files to typed settings and their objects; mistakes are UserErrors. Not API."""
