"""Products with quantised weights in C++: built when the package is installed, if there is a compiler."""
