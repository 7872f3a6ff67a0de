"""What a trainer on another host sends, passed on to every rank."""
