"""``wrap``: one model whose parts live at several workers, trained as if all of it were here."""
