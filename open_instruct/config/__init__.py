"""Options, their checks, the command line and YAML files."""
