"""The run: wires every layer; one loop for elastic, colocate and async."""
