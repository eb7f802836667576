"""The regression gate behind `redline perf`: counts that no noise touches, and times as ratios to a fixed piece of work."""
