"""What a client gets: tokens of the engine (`generation`) as text (`detokenizer`) in OpenAI's JSON (`documents`)."""
