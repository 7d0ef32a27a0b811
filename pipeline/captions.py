"""What each figure of stage `plot` shows, for readers who do not see it, and how the report names the figure's file."""

FIGURES = {
    "speedup": "Speed-up of every timed pair over own plain decoding and over the fastest baseline, with 95 % intervals, beside "
    "the prediction from c, v and τ.",
    "speedup_by_k": "Speed-up over plain decoding against k, a panel per pair: measured with 95 % intervals, predicted, ideal.",
    "attribution": "For every timed configuration, the product from Leviathan's ideal down to the measured speed-up: acceptance "
    "that is not independent, verification, overhead.",
    "comparison": "Tokens per second of plain decoding, speculative decoding and Hugging Face generate, by kernels and k, taken "
    "in turns in one run.",
    "cost_curve": "Time of one pass over n tokens, by kernels and context, of target and draft, beside the limit that memory "
    "and arithmetic set.",
    "tokens_per_round": "Tokens per target forward against k, measured with 95 % intervals and as independent acceptance "
    "predicts.",
    "acceptance_per_position": "Acceptance by position in the draft: of all proposed tokens, and of those whose predecessor was "
    "accepted.",
    "acceptance_vs_temperature": "Acceptance of a tested token against the sampling temperature, with 95 % intervals.",
    "accepted_per_round": "Histograms, one per pair: how many draft tokens a round accepts, with 95 % intervals, beside "
    "independent acceptance in rounds of the same lengths.",
    "by_category": "Acceptance of every pair and speed-up of the timed ones by category of prompts, with the range of single "
    "prompts and, where there are enough of them, 95 % intervals.",
    "block_verification": "Tokens per round by block verification over those by token verification, against the temperature.",
    "confidence": "Tokens per target forward, drafted tokens per emitted one and acceptance rate, against the threshold below "
    "which a draft stops.",
    "quantized_alpha": "Acceptance against bits per weight of the draft, by method of rounding, with 95 % intervals.",
    "quantized_by_category": "Acceptance of quantised drafts by category of prompts, greedy and sampled, with 95 % intervals.",
    "quantized_speedup": "Speed-up against bits per weight of the draft, measured and predicted.",
    "break_even": "How much acceptance a cheaper draft may lose until it no longer pays, and until speculation no longer pays.",
    "toy": "The toy pair in three panels: tokens per round against k beside the geometric curve of a constant acceptance; "
    "acceptance by depth beside that on real text, with the tokens tested; U-shaped acceptance against temperature.",
    "real": "A pair of language models in the same three panels: tokens per round against k, acceptance by depth beside the "
    "toy's, acceptance against temperature between its two limits.",
}


def shown(name: str) -> str:
    """The figure in Markdown."""
    return f"![{FIGURES[name]}]({name}.svg)"
