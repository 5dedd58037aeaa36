"""`wherry finetune`: a published model, trained further on one's own data."""
