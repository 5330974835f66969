"""HTML pages: the look that reports, the demo and the server share.

page: elements that escape what they contain, tables, images, the page itself · charts: SVG charts · style.css: the look
"""
