"""The names of experts, configuration, access, and the data types that all other packages use."""
