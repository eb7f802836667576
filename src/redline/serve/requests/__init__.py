"""What a client asks: read within bounds (`bodies`, `uploads`, `limits`), understood (`protocol`, `calls`), and let in where
there is room (`admission`)."""
