"""What each attention kind gives: models that differ in it alone, trained on the same tokens, and compared."""
