"""The names of experts, configuration, and the data types that all other packages use."""
