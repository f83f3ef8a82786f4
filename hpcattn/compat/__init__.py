"""Other libraries' function names and signatures over the operators of this package."""
