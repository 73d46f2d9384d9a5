"""How good a response is, told in processes that can do nothing but compute."""
