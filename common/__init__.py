"""What training, evaluation and the command line share: recipes, base models, documents, files, the environment."""
