// Tables and code that are wider than the page can be scrolled by keyboard.
document$.subscribe(() => {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) wrap.tabIndex = 0;
});
