"""The options of the plugin, a package for hydra.searchpath."""
