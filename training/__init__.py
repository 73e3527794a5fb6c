"""What the training recipes share: documents, lanes, loss, optimizer groups, evaluation, options."""
