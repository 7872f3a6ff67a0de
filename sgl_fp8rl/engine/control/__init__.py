"""Updates between the steps of SGLang's scheduler, and the channel that asks for them."""
