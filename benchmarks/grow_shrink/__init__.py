"""Starting from a smaller model and ending with a smaller one: a method is a module with `studies(*, quick: bool)`."""
