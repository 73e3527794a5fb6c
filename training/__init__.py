"""What the training recipes share: documents, lanes, loss, optimiser groups, evaluation, options."""
