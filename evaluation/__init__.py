"""How well an adapted model predicts documents that it was not trained on."""
