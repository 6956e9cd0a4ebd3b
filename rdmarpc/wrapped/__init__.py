"""``wrap``: one model whose parts live at several workers, trained as if it were here."""
