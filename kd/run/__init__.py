"""From a command line and YAML files to one typed configuration and the objects that it describes. Not API.

What the user has mistaken is a UserError, everywhere here."""
