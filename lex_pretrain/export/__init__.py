"""A checkpoint as a Hugging Face folder, with the files of this project that its model is made of."""
