"""LoCoMo's F1, calculated by hand from its published definition."""

import pytest

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.answer_f1 import locomo_f1, normalize_answer, word_f1


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Cat, and a Dog!", "cat dog"),
        ("86,000 euros", "86000 euros"),
        ("An  answer -- it's here.", "answer its here"),
        ("android and theory", "android theory"),
        ("", ""),
    ],
)
def test_normalisation(text, normal):
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("the cello", "cello", 1.0),
        ("she plays cello", "cello", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("running dogs", "the dog runs", 1.0),
        # Porter's original stems both to "gener"; its successor does not.
        ("generous", "generate", 1.0),
        ("tea tea", "tea", 2 * 0.5 * 1 / 1.5),
        ("coffee", "tea", 0.0),
        ("", "tea", 0.0),
        ("tea", "", 0.0),
    ],
)
def test_word_f1(prediction, gold, score):
    assert word_f1(prediction, gold) == pytest.approx(score)


def test_multi_hop_takes_the_best_part_for_each_gold_part():
    # "pottery class" finds its equal, "camping" finds "camping trip": precision 1/2, recall 1.
    score = locomo_f1("camping trip, pottery class", "pottery class, camping", category=1)
    assert score == pytest.approx((1.0 + 2 / 3) / 2)


def test_other_categories_compare_the_whole_text():
    assert locomo_f1("camping", "pottery, camping", category=4) == pytest.approx(2 / 3)


def test_open_domain_uses_the_gold_before_the_first_semicolon():
    assert locomo_f1("likely no", "Likely no; because she said so", category=3) == 1.0
    assert locomo_f1("likely no", "Likely no; because she said so", category=2) < 1.0


def test_category_five_has_no_score():
    with pytest.raises(InvalidArgumentError, match="category = 5"):
        locomo_f1("a", "b", category=5)


def test_stemmer_agrees_with_nltk():
    stemming = pytest.importorskip("nltk.stem")
    from phasekv.evaluation import answer_f1

    theirs = stemming.PorterStemmer()
    for word in ("relational", "hopping", "conversations", "happily", "adoption", "agencies"):
        assert answer_f1._STEMMER.stemWord(word) == theirs.stem(word)
